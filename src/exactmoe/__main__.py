"""`python -m exactmoe`, the same as `exactmoe`."""

from exactmoe.cli import main

main()
