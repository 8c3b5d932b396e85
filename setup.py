"""The package. Versions that are known to work together are pinned in the Makefile, not here."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "hpctrain/__init__.py").read_text(), re.MULTILINE).group(1)

setup(
    name="hpctrain",
    version=VERSION,
    description="Distributed training of PyTorch models where MPI is the transport",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["hpctrain", "hpctrain.*"]),
    include_package_data=True,
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
        "test": ["pytest>=8", "pytest-mpi>=0.6", "hypothesis>=6.100", "ruff>=0.6"],
    },
    entry_points={"console_scripts": ["hpctrain=hpctrain.__main__:main"]},
)
