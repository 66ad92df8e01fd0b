"""`python -m exactmoe`, the same as `exactmoe`."""

from exactmoe.cli import main

if __name__ == "__main__":
    main()
