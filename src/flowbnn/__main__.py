"""``python -m flowbnn`` is the command line."""

from flowbnn.cli import main

if __name__ == "__main__":
    main()
