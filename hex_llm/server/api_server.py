"""``python -m hex_llm.server.api_server …`` starts the same server as ``hexllm serve …``.

This is the command that Vertex AI deployments of Google's Hex-LLM container carry. All of it is
``hexllm.server.main``; nothing else of Hex-LLM's modules is here.
"""

import sys

if __name__ == "__main__":
    # Imported here only: the engine process imports this module again when it is spawned, and
    # must not load the server.
    from hexllm.server.main import main

    sys.exit(main(sys.argv[1:]))
