"""The only package that imports mindformers and mindspore. Importing it installs nothing: ``mindresume.plugin`` does."""
