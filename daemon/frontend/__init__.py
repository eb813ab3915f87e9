"""syshax-api: the OpenAI HTTP API in front of vLLM workers. A request enters in `app`; it holds no weights."""
