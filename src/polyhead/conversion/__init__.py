"""One head layout into another: exact steps with proofs, lossy steps with costs, healing.

new, report = convert(model, latent=(64, 128), calibration=texts)
new, healing = heal(new, teacher=model, texts=texts, minutes=10)
"""

from polyhead.conversion.converting import convert
from polyhead.conversion.healing import Healing, heal
from polyhead.conversion.report import Report
from polyhead.conversion.saving import save

__all__ = ["Healing", "Report", "convert", "heal", "save"]
