"""The commands of scripts/paper.py, one subject a module."""
