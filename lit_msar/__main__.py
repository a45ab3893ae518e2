"""`python -m lit_msar COMMAND`."""

import sys

if __name__ == "__main__":
    from lit_msar.cli import main

    sys.exit(main(sys.argv[1:]))
