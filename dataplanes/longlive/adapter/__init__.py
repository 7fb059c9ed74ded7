"""The adapter of the real LongLive-2.0, and the worker process that any video engine can run in.

settings = WorkerSettings(
    factory="dataplanes.longlive.adapter.longlive_engine:make_engine", keywords={"deployment": "longlive.toml"}
)
with WorkerEngine(settings) as engine:
    engine.load(LoadSpec(checkpoint="", setting=setting))
"""
