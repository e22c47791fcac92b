"""One head layout into another: exact steps with proofs, lossy steps with prices, healing."""
