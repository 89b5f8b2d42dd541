"""Version of the library, which is also that of the distribution."""

__version__ = "0.2.0"
