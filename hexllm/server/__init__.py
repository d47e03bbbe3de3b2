"""Ring 3: the HTTP server: Vertex and OpenAI routes, tokenizer, streaming, metrics."""
