"""`python -m jax_qla`: see jax_qla/doctor.py."""

from __future__ import annotations

import sys

from jax_qla.doctor import main

sys.exit(main())
