"""One logger for the package; the command line decides where its lines go."""

import logging

logger = logging.getLogger("meshwright")
