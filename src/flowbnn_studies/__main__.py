"""Runs the command line by ``python -m flowbnn_studies``."""

from flowbnn_studies.cli import main

if __name__ == "__main__":
    main()
