"""Code shared by the plugins for vLLM and SGLang; nothing here imports an engine.

``layers.py`` keeps and multiplies a layer's packed weight and reads the plugins' settings,
``stored.py`` packs the layers of checkpoints, and ``directory.py`` loads what
``cutlass-ops reorder`` wrote, of which ``shards.py`` and ``slices.py`` cut a rank's part.
"""
