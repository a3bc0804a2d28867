"""Parses the command line of ``run_mindformer.py`` and writes it into the configuration.

arguments.parse ─▶ values ─▶ overrides.apply
"""
