"""Installs mindresume with tools that call setup.py; everything about the package is in
pyproject.toml."""

from setuptools import setup

setup()
