"""Device and host KV pools of one rank: byte buffers and slots. They know token slots, and nothing of ranks or logical locs."""
