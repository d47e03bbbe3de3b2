"""The retired container's module name, so that its deployments start hexllm unchanged."""
