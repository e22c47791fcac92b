"""Training: the loss, the loop, and models for Hugging Face's Trainer and Lightning."""

from polyhead.training.indexer import indexer_loss
from polyhead.training.losses import cross_entropy, loss
from polyhead.training.run import Batch, Run, Step
from polyhead.training.schedule import Schedule
from polyhead.training.trainable import Trainable

__all__ = ["Batch", "Run", "Schedule", "Step", "Trainable", "cross_entropy", "indexer_loss", "loss"]
