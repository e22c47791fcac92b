"""Helpers that every package may use: arguments checked, files, pictures, texts."""
