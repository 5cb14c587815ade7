"""What the plugins of the inference engines, vLLM and SGLang, share; nothing here imports an engine.

``layers.py`` keeps and multiplies a layer's packed weight and reads the plugins' settings,
``directory.py`` loads what ``cutlass-ops reorder`` wrote, ``shards.py`` and ``slices.py`` cut a
rank's part of it.
"""
