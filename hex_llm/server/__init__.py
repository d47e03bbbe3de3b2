"""Holds ``api_server``, the module that Hex-LLM deployments name in their command."""
