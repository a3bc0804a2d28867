"""Contains all code that imports mindformers or mindspore. Importing it installs nothing:
``mindresume.plugin`` does."""
