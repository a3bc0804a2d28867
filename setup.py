"""Installs mindresume. The pinned pair of mindformers and mindspore is the extra ``mindformers``."""
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (HERE / "mindresume/__init__.py").read_text(encoding="utf-8")).group(1)

MINDFORMERS = [
    "mindformers==1.9.0",
    "mindspore==2.9.0",
    "numpy>=1.26,<2",            # what mindformers 1.9.0 asks for
    "safetensors>=0.4.5,<0.8",   # 0.8.0 makes MindSpore's transform engine write wrong bytes without an error
]
S3 = ["s3fs==2025.3.0"]          # needs fsspec of the same version; every datasets that mindformers 1.9.0 takes accepts this one
TEST = ["pytest>=8", "pytest-timeout", "pytest-xdist>=3.5", "hypothesis>=6.100", "ruff>=0.6", "matplotlib>=3.7",
        "tokenizers>=0.20", "greenlet>=3", "import-linter>=2.1", "moto[server]>=5", *S3]

setup(
    name="mindresume",
    version=VERSION,
    description="Checkpoint and resume for MindSpore Transformers: survives anything, continues exactly",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["mindresume", "mindresume.*"]),
    package_data={"mindresume": ["py.typed", "mindformers/shim/*.py", "report/*.html"]},
    install_requires=["numpy>=1.24", "safetensors>=0.4.5", "pyyaml>=6", "ml_dtypes>=0.3", "xxhash>=3.4", "rich>=13",
                      "typer>=0.12", "jinja2>=3.1"],
    extras_require={"mindformers": MINDFORMERS, "test": TEST, "plot": ["matplotlib>=3.7"], "simulate": ["greenlet>=3"],
                    "s3": S3},
    entry_points={"console_scripts": ["mindresume=mindresume.cli:main"]},
)
