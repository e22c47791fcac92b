"""OpenAI's API over the engine. Read in this order: ``options``, ``jobs``, ``texts``, ``app``."""
