"""Measuring: speed beside other libraries, and head layouts trained side by side."""
