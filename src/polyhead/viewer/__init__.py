"""Looks at a model on a text, the page that shows them, its file and its server; SVG pictures."""
