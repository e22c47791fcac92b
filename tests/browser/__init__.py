"""Tests that need a browser; a package, so that file names may repeat those of other folders."""
