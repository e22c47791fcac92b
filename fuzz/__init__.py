"""Fuzzing: every reader of untrusted input, and the operation itself, on random cases.

    python -m fuzz                                # every target for a minute, seed 7
    python -m fuzz gguf --minutes 60 --seed 8     # one target for an hour
    python -m fuzz gguf --case 8:1234             # one case again, without limits

A target is a file of ``targets/`` with ``case(random: random.Random) -> None``, and ``prepare()``
where something is made or imported once. A case returns (the input was read, and what is known of
the result holds), or raises an error that is a sentence; anything else is a failure. Inputs are
mutations of real files: the formats have checks at every step that bytes at random never pass.
"""
