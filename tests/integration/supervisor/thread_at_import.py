"""A module as some libraries are: importing it starts a thread."""

import threading
import time

threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
