"""An OpenAI-compatible server around one model: completions and chat, one request at a time.

requests -> a Job in the engine's line -> pieces of text -> answers. docs/serve.md.
"""
