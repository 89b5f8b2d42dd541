"""``python -m flowbnn_studies`` is the command line."""

from flowbnn_studies.cli import main

if __name__ == "__main__":
    main()
