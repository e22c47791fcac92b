"""Training: the loss, and models as Hugging Face's Trainer, accelerate and Lightning call them."""

from polyhead.training.losses import cross_entropy, loss
from polyhead.training.trainable import Trainable

__all__ = ["Trainable", "cross_entropy", "loss"]
