"""`python -m lit_msar COMMAND`."""

import os
import sys

if __name__ == "__main__":
    # Before torch is loaded. Threads that wait asleep, not spinning, give their core to whoever has work: on two cores
    # shared with other programs a mHC step at size tiny went from 2.2 s to 0.5 s.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from lit_msar.cli import main

    sys.exit(main(sys.argv[1:]))
