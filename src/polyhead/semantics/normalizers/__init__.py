"""Normalizers: how scores become weights where it is not by a softmax, a file each."""

from polyhead.semantics.normalizer import Normalizer
from polyhead.semantics.normalizers.contextual_positions import CoPE
from polyhead.semantics.normalizers.entmax import Entmax
from polyhead.semantics.normalizers.multi_token import MultiToken
from polyhead.semantics.normalizers.sigmoid import Sigmoid
from polyhead.semantics.normalizers.softpick import Softpick
from polyhead.semantics.normalizers.stick_breaking import StickBreaking
from polyhead.semantics.normalizers.talking_heads import TalkingHeads

__all__ = [
    "CoPE",
    "Entmax",
    "MultiToken",
    "Normalizer",
    "Sigmoid",
    "Softpick",
    "StickBreaking",
    "TalkingHeads",
]
