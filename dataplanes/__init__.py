"""Data planes: what runs inside the systems that controld steers. They know of controld only its contract."""
