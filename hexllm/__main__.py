"""``python -m hexllm`` is the ``hexllm`` command."""

import sys

from hexllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
