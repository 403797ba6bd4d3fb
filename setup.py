"""Package metadata, and the C++ index helper that installation builds where it can."""

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup


class OptionalBuild(build_ext):
    """Builds what the machine can build; a helper that fails costs a note, never the installation."""

    def build_extension(self, extension):
        try:
            super().build_extension(extension)
        # a missing compiler, missing Python headers and a full disk raise different kinds
        except Exception as error:  # noqa: BLE001
            print(f"note: {extension.name} was not built ({error}); the slower NumPy path gives the same arrays")


QUICKSTART = ["polib>=1.2,<2", "django>=5.0,<6"]

setup(
    name="megatron-bitfit",
    version="0.1.0",
    description="Trainer for BLOOM-class language models whose --bitfit really freezes",
    packages=find_packages(include=["megatron", "megatron.*"]),
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6,<2.15",
        # its handling of frozen parameters was measured on 0.19.8 and changes between releases
        "deepspeed>=0.19.8,<0.20",
        "numpy>=1.26,<3",
        "regex>=2024.5.10",
        "pybind11>=2.12,<4",
        "tokenizers>=0.20,<0.24",
        "safetensors>=0.4.5,<1",
        "tqdm>=4.66,<5",
        "transformers>=5,<6",
        "tensorboard>=2.17,<3",
    ],
    extras_require={
        "test": ["pytest>=8,<10", "hypothesis>=6.100,<7", *QUICKSTART],
        "quickstart": QUICKSTART,
        "retention": ["matplotlib>=3.8,<4"],
        "benchmark": ["peft>=0.17,<0.22"],
        "dev": ["ruff>=0.17,<0.18", "mypy>=2.4,<2.5"],
    },
    # optional: setuptools does not miss the file when it was not built
    ext_modules=[Pybind11Extension("megatron.data.helpers", ["megatron/data/helpers.cpp"], cxx_std=17,
                                   optional=True)],
    cmdclass={"build_ext": OptionalBuild},
)
