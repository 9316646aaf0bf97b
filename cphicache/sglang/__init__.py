"""cphicache inside the SGLang scheduler, as a plug-in (``--radix-cache-backend cphicache``); see docs/sglang.md.

SGLang finds :func:`cphicache.sglang.plugin.activate` through the entry-point group ``sglang.srt.plugins``.
"""
