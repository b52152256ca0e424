"""`python -m aioreplica`: see `aioreplica.cli`."""

from aioreplica.cli import main

if __name__ == "__main__":
    main()
