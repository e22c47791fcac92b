"""The lesson: multi-head attention in twelve scenes, one HTML file that needs only a browser.

``numbers.py`` computes what the scenes show. Three files hold what takes a model or a training:
``heads.json``, ``real.json`` and ``training.json``, each made by the module of its name.
``exercises.py`` has the answers of the exercises, the folder ``page/`` a script for each scene,
``page.py`` puts it together.
"""

from polyhead.viewer.lesson.page import render, write

__all__ = ["render", "write"]
