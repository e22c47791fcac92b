"""The search for texts: options, rules, sampling, beams, streaming, recorded steps."""
