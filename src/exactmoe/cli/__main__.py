"""`python -m exactmoe.cli`, the same as `exactmoe`."""

from exactmoe.cli import main

main()
