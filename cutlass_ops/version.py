"""The package's version, which pyproject.toml and CMakeLists.txt read here."""

__version__ = "0.1.0"
