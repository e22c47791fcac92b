"""One file for each target; its name is the target's."""
