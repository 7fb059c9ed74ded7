"""The PD plane: compresses KV on its way from a prefill to a decode server, inside SGLang's own transfer threads."""
