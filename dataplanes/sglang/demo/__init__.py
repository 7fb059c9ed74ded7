"""The demonstration and the evidence: the real pair over a shaped link, arm against arm on the same prompts."""
