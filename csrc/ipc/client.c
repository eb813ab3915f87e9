#include "ipc/client.h"

uint32_t syshax_client_abi(void) { return SYSHAX_CLIENT_ABI; }
