"""Healthy public training programs under Proctor; see `__main__.py`."""
