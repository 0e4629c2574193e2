// 8 threads make 1000 calls each; half of them wrong calls, whose sentence must be the thread's own.
#include <pthread.h>

#include "check.h"

static void *work(void *arg) {
	int id = *(int *)arg;
	one_token x;
	char want[100];
	for (int i = 0; i < 1000; i++) {
		set_one_token(&x);
		if (id % 2) {
			x.a.gate = 100 + id;
			snprintf(want, sizeof want, "gdn_fwd: gate is %d, expected 0 or 1", 100 + id);
			CHECK(gdn_fwd(&x.a) == GDN_INVALID_ARGUMENT && strcmp(gdn_last_error(), want) == 0);
		} else {
			CHECK(gdn_fwd(&x.a) == GDN_OK && same(x.o, want_o, 2) && same(x.ht, want_ht, 4) && gdn_last_error()[0] == 0);
		}
	}
	return NULL;
}

int main(void) {
	pthread_t thread[8];
	int id[8];
	for (int i = 0; i < 8; i++) {
		id[i] = i;
		CHECK(pthread_create(&thread[i], NULL, work, &id[i]) == 0);
	}
	for (int i = 0; i < 8; i++)
		pthread_join(thread[i], NULL);
	return 0;
}
