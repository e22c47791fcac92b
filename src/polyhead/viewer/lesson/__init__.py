"""The lesson: multi-head attention in ten scenes, one HTML file that needs nothing but a browser.

``numbers.py`` computes what the scenes show, ``heads.json`` holds what takes minutes of training
(``heads.py``), the folder ``page/`` has a script for each scene, ``page.py`` puts it together.
"""

from polyhead.viewer.lesson.page import render, write

__all__ = ["render", "write"]
