"""From text to token shards and back to samples: numpy only, no torch, nothing of `lit_msar`.

`prepare` writes a directory of shards, `shards` defines their format, `order` says which sample comes when, `split`
reads samples.
"""
